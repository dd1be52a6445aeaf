/* The wide links between regions: forwards packets from one region's TUN device to another's, with a rate, a queue and
   a delay for every ordered pair of regions. Packets that find the queue full are dropped.

       wide_link RATE DELAY QUEUE NAMESPACE...      bytes per second, microseconds, bytes; one namespace per region

   An address 10.R.x.y belongs to region R, counted from 0. Prints "ready" when all devices (named wide) exist. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { REGIONS = 16, PACKET = 65536, BURST = 32 };
struct packet { double due; struct packet *next; int length; unsigned char data[]; };
static struct { struct packet *first, *last; double free_at; } links[REGIONS][REGIONS];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int open_tun(const char *namespace) {
    struct ifreq request = {.ifr_name = "wide", .ifr_flags = IFF_TUN | IFF_NO_PI};
    int place = open(namespace, O_RDONLY), tun;
    if (place < 0 || setns(place, CLONE_NEWNET) || (tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK)) < 0 ||
        ioctl(tun, TUNSETIFF, &request)) {
        perror(namespace);
        exit(1);
    }
    return tun;
}

int main(int count, char **words) {
    double rate = atof(words[1]), delay = atof(words[2]) * 1e-6, queue = atof(words[3]);
    int regions = count - 4;
    struct pollfd tuns[REGIONS];
    unsigned char data[PACKET];
    for (int a = 0; a < regions; a++) tuns[a] = (struct pollfd){open_tun(words[4 + a]), POLLIN, 0};
    puts("ready");
    fflush(stdout);
    for (;;) {
        double at = now(), next = at + 1;
        for (int a = 0; a < regions; a++)
            for (int n = 0; n < BURST; n++) {
                int length = read(tuns[a].fd, data, PACKET), b = data[17];
                if (length < 20) break;
                if (data[0] >> 4 != 4 || b >= regions || b == a) continue;
                double starts = links[a][b].free_at > at ? links[a][b].free_at : at;
                if ((starts - at) * rate > queue) continue;
                struct packet *p = malloc(sizeof *p + length);
                links[a][b].free_at = starts + length / rate;
                *p = (struct packet){links[a][b].free_at + delay, NULL, length};
                memcpy(p->data, data, length);
                if (links[a][b].first) links[a][b].last->next = p;
                else links[a][b].first = p;
                links[a][b].last = p;
            }
        for (int a = 0; a < regions; a++)
            for (int b = 0; b < regions; b++) {
                struct packet *p;
                while ((p = links[a][b].first) && p->due <= at) {
                    if (write(tuns[b].fd, p->data, p->length) < 0) perror("write");
                    links[a][b].first = p->next;
                    free(p);
                }
                if (p && p->due < next) next = p->due;
            }
        double wait = next - now();
        struct timespec t = {0, wait > 0 ? (wait < 0.9 ? wait : 0.9) * 1e9 : 0};
        ppoll(tuns, regions, &t, NULL);
    }
}
