"""Keeps an agent's process away from the run's folder and from other processes, as far as the system allows it.

Three protections, each without privileges of its own where the kernel permits it:
- A mount namespace of its own, in which the hidden folders are empty and read-only. A user who is not root needs user
  namespaces for this; many containers forbid them.
- A Landlock domain of its own: the process can neither trace nor signal processes outside, read their memory or their
  environment variables, nor change mounts. This also holds for root. It exists since Linux 5.13; signals since 6.12.
- Root's rights to go around this (CAPABILITIES) are given up for good.

With `strict`, if there is no mount namespace, Landlock lets the process read and change only files and folders that are
outside the hidden folders when it starts. Landlock knows no exceptions, so every folder beside them is allowed by
itself: directly in a folder above a hidden folder, the process can neither create files nor read those that are created
later. This is why it is not the default.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CLONE_NEWNS, CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 1, 2, 4, 8, 1 << 14, 1 << 19
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls of Landlock: the same numbers on all architectures."""
MAKE_BLOCK, REFER = 1 << 11, 1 << 13
FILE_ACCESS, TRUNCATE = 1 << 1 | 1 << 2, 1 << 14
"""Writing and reading a file; since version 3 of the interface also truncating it."""
FOLDER_ACCESS = sum(1 << bit for bit in (4, 5, 6, 7, 8, 9, 10, 12))
"""Removing and creating files and folders of all kinds, except block devices."""
SCOPE_SIGNAL = 1 << 1
CAPABILITIES = {
    "dac_read_search": 2, "sys_module": 16, "sys_rawio": 17, "sys_ptrace": 19, "sys_admin": 21, "sys_boot": 22,
    "mknod": 27, "perfmon": 38, "bpf": 39,
}  # fmt: skip
CAPABILITY_VERSION = 0x2008_0522


@dataclass(frozen=True, kw_only=True, slots=True)
class Protections:
    mounts: bool = False
    landlock: int = 0
    """Version of Landlock's interface; 0: not available."""

    def hides_files(self, strict: bool) -> bool:
        return self.mounts or (strict and self.landlock > 0)


def available() -> Protections:
    """Try what this system allows, in a forked process. To be called in a process with one thread."""
    abi = max(0, _libc().syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _own_proc_files()
            _hide([os.getcwd()])
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    return Protections(mounts=os.waitpid(pid, 0)[1] == 0, landlock=abi)


def isolate(hidden: Sequence[str], use: Protections, *, strict: bool = False) -> None:
    """Isolate this process, which must have one thread, and all that it will start. Raises OSError."""
    _own_proc_files()
    folders = [os.path.realpath(folder) for folder in hidden]
    if use.mounts:
        _hide(folders)
    if use.landlock:
        _enter_domain(folders if strict and not use.mounts else [], use.landlock)
    _drop_capabilities()


def forbid_tracing() -> None:
    """Other processes of the same user can no longer read this one's memory or environment variables (root can)."""
    _libc().prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _own_proc_files() -> None:
    """Undo `forbid_tracing` of the parent: otherwise this process's own files in /proc are root's, and a user who is
    not root cannot set up a user namespace."""
    _libc().prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _hide(folders: Sequence[str]) -> None:
    libc, uid, gid = _libc(), os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNS) < 0:
        _checked(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _checked(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None), "mount /")
    flags = ctypes.c_ulong(MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for folder in folders:
        _checked(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, b"size=4k,mode=555"), f"mount {folder}")


def _enter_domain(hidden: Sequence[str], abi: int) -> None:
    """Enter a Landlock domain. What it handles is forbidden unless a rule allows it: creating block devices, which no
    agent needs, and, if there are `hidden` folders, reading files and every change."""
    libc = _libc()
    outside = FILE_ACCESS | FOLDER_ACCESS | (TRUNCATE if abi >= 3 else 0) if hidden else 0
    handled, everywhere = MAKE_BLOCK | outside, 0
    if abi >= 2:  # moving files between folders is forbidden by every domain that does not allow it
        handled, everywhere = handled | REFER, REFER
    scoped = SCOPE_SIGNAL if abi >= 6 else 0
    attributes = struct.pack("<QQQ", handled, 0, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _checked(
        libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)), "landlock"
    )
    try:
        if everywhere:
            _allow(ruleset, "/", everywhere)
        for path in _outside(hidden) if hidden else ():
            with contextlib.suppress(OSError):  # it is gone meanwhile
                _allow(ruleset, path, outside)
        if libc.syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)) < 0:
            _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
            _checked(libc.syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)), "landlock")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not stat.S_ISDIR(os.fstat(found).st_mode):
            access &= FILE_ACCESS | TRUNCATE
        rule = struct.pack("<Qi", access, found)
        _checked(_libc().syscall(ADD_RULE, ctypes.c_int(ruleset), 1, rule, ctypes.c_uint(0)), f"landlock {path}")
    finally:
        os.close(found)


def _outside(folders: Sequence[str], top: str = "/") -> Iterator[str]:
    """The largest files and folders that contain none of these folders and are not inside one. Of a folder above them
    that this user may not list, such as /home, nothing else is found."""
    below = top.rstrip("/") + "/"
    leading = {below + folder.removeprefix(below).partition("/")[0] for folder in folders if folder.startswith(below)}
    with contextlib.suppress(PermissionError), os.scandir(top) as entries:
        yield from (entry.path for entry in entries if entry.path not in leading and not entry.is_symlink())
    for path in leading.difference(folders):
        yield from _outside(folders, path)


def _drop_capabilities() -> None:
    libc = _libc()
    header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
    sets = ctypes.create_string_buffer(24)
    if libc.capget(header, sets) < 0:
        return
    values = list(struct.unpack("<6I", sets.raw))  # effective, permitted, inheritable; then the same for 32 and above
    for number in CAPABILITIES.values():
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
        word = 3 * (number // 32)
        for n in range(word, word + 3):
            values[n] &= ~(1 << number % 32)
    _checked(libc.capset(header, struct.pack("<6I", *values)), "capset")
