"""Who may do what over HTTP, and what a request that is not right is answered."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.test_views import shown
from tests.support.runs.job_service import RECIPE
from tests.support.runs.service_folder import turn
from tests.support.servers.certificates import self_signed
from windfall.errors import WindfallError
from windfall.jobs import api as apis
from windfall.jobs import machines, store
from windfall.jobs.client import JobsClient, RequestRefused
from windfall.jobs.machine import host as hosts
from windfall.jobs.machine import join
from windfall.jobs.machine.join import JoinedMachine
from windfall.jobs.service import Service
from windfall.jobs.settings import FleetSettings
from windfall.jobs.turn_log import TurnLog
from windfall.jobs.views import table
from windfall.jobs.views.page import ServiceFiles
from windfall.link import tls
from windfall.recipe.file import load_recipe
from windfall.recipe.fleet import Fleet

SETTINGS = FleetSettings(devices="cpu", price_usd_per_h=3.6)


@asynccontextmanager
async def serving(folder: Path, **more: Any) -> AsyncIterator[tuple[Service, str]]:
    """A service that starts no job. `more`: of its settings."""
    settings = SETTINGS.model_copy(update={"folder": folder, **more})
    service = Service(settings, lambda line: None)
    service.stopping = True
    api = apis.Api(service)
    ssl = tls.server_context(Fleet(tls_cert=settings.tls_cert, tls_key=settings.tls_key))
    runner, port = await api.open("127.0.0.1", 0, ssl)
    try:
        yield service, apis.url("127.0.0.1", port, secure=ssl is not None)
    finally:
        api.close()
        await runner.cleanup()


def asked(folder: Path, ask: Callable[[Service, str], Any], **more: Any) -> Any:
    """The result of a function that asks the service, in a thread."""

    async def main() -> Any:
        async with serving(folder, **more) as (service, url):
            return await asyncio.to_thread(ask, service, url)

    return asyncio.run(main())


def status(url: str, token: str, method: str = "GET", body: bytes | None = None) -> int:
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {token}"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as e:
        code, answer = e.code, json.load(e)
    assert set(answer["error"]) == {"what", "where", "fix"}
    return code


def test_a_token_allows_its_own_job_and_nothing_else(tmp_path: Path) -> None:
    def ask(service: Service, url: str) -> None:
        fleet = JobsClient(url, service.token)
        a, b = (fleet.post("/jobs", recipe=RECIPE, name=name)["token"] for name in "ab")
        assert len({a, b, service.token}) == 3
        assert (tmp_path / "jobs/a/token").stat().st_mode & 0o777 == 0o600
        assert set(fleet.get("/jobs")["jobs"]) == {"a", "b"}
        own = JobsClient(url, a).get("/jobs")
        assert set(own["jobs"]) == {"a"}
        assert own["devices"] == {}, "they name the jobs of others"
        assert status(f"{url}/jobs/a", a) == 200
        assert status(f"{url}/jobs/b", a) == status(f"{url}/jobs/nothing", a) == 404
        for path in ("jobs/b/stop", "jobs/b/resume"):
            assert status(f"{url}/{path}", a, "POST", b"{}") == 404
        for path in ("jobs", "machines/other"):
            assert status(f"{url}/{path}", a, "POST", b"{}") == 403
        assert status(f"{url}/metrics", a) == 403
        assert service.store.jobs["b"].state == "queued"
        assert JobsClient(url, a).post("/jobs/a/stop")["state"] == "stopped"
        assert service.store.jobs["a"].state == "stopped"
        assert status(f"{url}/jobs/a/resume", a, "POST", b'{"max_usd": 9}') == 403
        for terms in (b'{"share": 9}', b'{"priority": 9}', b'{"deadline_s": 9}'):
            assert status(f"{url}/jobs/a/resume", a, "POST", terms) == 400, "they stay as they were submitted"
        assert (service.store.jobs["a"].state, service.store.jobs["a"].max_usd) == ("stopped", 0.0)
        with pytest.raises(WindfallError, match="Use the fleet's token for --max-usd"):
            JobsClient(url, a).post("/jobs/a/resume", max_usd=9.0)
        assert JobsClient(url, a).post("/jobs/a/resume")["state"] == "queued"
        JobsClient(url, a).post("/jobs/a/stop")
        assert fleet.post("/jobs/a/resume", max_usd=9.0)["max_usd"] == 9.0

    asked(tmp_path, ask)


@pytest.mark.parametrize("token", ["", "wrong-token-1234567", "é" * 20])
def test_nothing_is_shown_without_a_token(tmp_path: Path, token: str) -> None:
    def ask(service: Service, url: str) -> None:
        latin = token.encode().decode("latin-1")
        for method, path in (("GET", "jobs"), ("GET", "metrics"), ("POST", "jobs"), ("GET", "jobs/a")):
            assert status(f"{url}/{path}", latin, method, b"{}" if method == "POST" else None) == 401
        assert status(f"{url}/health", latin) == 200

    asked(tmp_path, ask)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "../x"}, "cannot be the name of a job"),
        ({"name": "a", "share": 0}, "share = 0"),
        ({"name": "a", "max_usd": -1}, "max_usd = -1"),
        ({"name": "a", "recipe": "[run"}, "not valid TOML"),
        ({"name": "a", "recipe": "[run]\nstep = 1"}, "unknown key 'run.step'"),
        ({"name": "a", "more": 1}, "unknown field `more`"),
        ({"name": 5}, "Expected `str`"),
        ({"name": "here"}, "there is a job 'here' already"),
    ],
)
def test_submission_that_is_not_right_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    def ask(service: Service, url: str) -> None:
        client = JobsClient(url, service.token)
        client.post("/jobs", recipe=RECIPE, name="here")
        with pytest.raises(WindfallError, match=said.replace("`", ".")):
            client.post("/jobs", **{"recipe": RECIPE, **fields})
        assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["here"]

    asked(tmp_path, ask)


def test_metrics_and_jobs_say_what_was_spent(tmp_path: Path) -> None:
    def ask(service: Service, url: str) -> None:
        client = JobsClient(url, service.token)
        client.post("/jobs", recipe=RECIPE, name="a", max_usd=2.0)
        hour = 3600 * 10**9
        said = client.post("/machines/m", life="x", times={"gpu0": {"a": hour, "": hour}}, price_usd_per_h=2.0)
        assert said == {"jobs": [], "turns": 0}
        asyncio.run(service._look())
        assert client.get("/jobs/a")["usd"] == 2.0
        assert client.get("/jobs")["devices"]["m/gpu0"]["used_s"] == {"a": 3600.0}
        with pytest.raises(WindfallError, match="another machine has joined as 'm'"):
            client.post("/machines/m", life="y", times={}, price_usd_per_h=2.0)
        client.post("/jobs/a/stop")
        with pytest.raises(WindfallError, match=r"has spent \$2.0000 of \$2"):
            client.post("/jobs/a/resume")
        assert client.post("/jobs/a/resume", max_usd=3.0)["state"] == "queued"
        request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {service.token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert 'windfall_job_usd{job="a"} 2.000000' in answer.read().decode()

    asked(tmp_path, ask)


def test_ended_job_is_removed_and_stays_on_the_bill(tmp_path: Path) -> None:
    hour = 3600 * 10**9

    def ask(service: Service, url: str) -> None:
        client = JobsClient(url, service.token)
        a, b = (client.post("/jobs", recipe=RECIPE, name=name)["token"] for name in "ab")
        report = {"life": "x", "price_usd_per_h": 2.0}
        client.post("/machines/m", times={"gpu0": {"a": hour, "b": hour, "": hour}}, **report)
        with pytest.raises(WindfallError, match="job 'a' is queued\nStop it first"):
            JobsClient(url, a).delete("/jobs/a")
        client.post("/jobs/a/stop")
        assert status(f"{url}/jobs/a", b, "DELETE") == 404
        JobsClient(url, a).delete("/jobs/a")
        assert status(f"{url}/jobs/a", a) == 401, "its token is gone with it"
        assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["b"]
        asyncio.run(service._look())
        found = client.get("/jobs")
        assert (found["jobs"]["b"]["usd"], found["bill"]["removed_usd"]) == (2.0, 2.0)
        assert found["bill"]["usd"] == pytest.approx(4.0 + found["bill"]["idle_usd"])
        assert found["devices"]["m/gpu0"]["used_s"] == {"(removed)": 3600.0, "b": 3600.0}
        assert "$2.00 of removed jobs" in shown(table.table(found))
        client.post("/jobs", recipe=RECIPE, name="a", max_usd=1.0)
        client.post("/machines/m", times={"gpu0": {"a": hour + hour // 4, "b": hour, "": hour}}, **report)
        asyncio.run(service._look())
        found = client.get("/jobs")
        assert (found["jobs"]["a"]["usd"], found["bill"]["removed_usd"]) == (0.5, 2.0)
        assert found["devices"]["m/gpu0"]["used_s"] == {"(removed)": 3600.0, "a": 900.0, "b": 3600.0}

    def ask_again(service: Service, url: str) -> None:
        asyncio.run(service._look())
        found = JobsClient(url, service.token).get("/jobs")
        assert [found["jobs"][name]["usd"] for name in "ab"] == [0.5, 2.0]
        assert found["bill"]["removed_usd"] == 2.0
        assert found["bill"]["usd"] == pytest.approx(4.5 + found["bill"]["idle_usd"])

    asked(tmp_path, ask)
    asked(tmp_path, ask_again)


def test_slow_disk_delays_no_other_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, may_write, write = threading.Event(), threading.Event(), store.write

    def slow(path: Path, data: bytes) -> None:
        writing.set()
        assert may_write.wait(60), "waited 60 s for the answer about the other job"
        write(path, data)

    def ask(service: Service, url: str) -> None:
        client = JobsClient(url, service.token)
        for name in "ab":
            client.post("/jobs", recipe=RECIPE, name=name)
        monkeypatch.setattr(store, "write", slow)
        stops = threading.Thread(target=client.post, args=("/jobs/a/stop",))
        stops.start()
        assert writing.wait(60)
        assert client.get("/jobs/b")["state"] == "queued"
        assert stops.is_alive(), "it is answered when it is on the disk"
        may_write.set()
        stops.join(60)
        assert json.loads((tmp_path / "jobs/a/job.json").read_text())["state"] == "stopped"

    asked(tmp_path, ask)


def test_service_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="the service does not answer"):
        JobsClient("http://127.0.0.1:9", "0123456789abcdef").get("/jobs")
    with pytest.raises(WindfallError, match="no service has this folder"):
        JobsClient(str(tmp_path), None)


def test_processes_of_a_job_do_not_get_the_fleets_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDFALL_FLEET_TOKEN", "the-token-of-the-fleet")
    found = hosts.environment({"KEY": "own"}, token="of-the-job")
    assert (found["KEY"], found["WINDFALL_TOKEN"]) == ("own", "of-the-job")
    assert "the-token-of-the-fleet" not in found.values()


def test_service_with_a_certificate_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    (cert, key), (other, _) = self_signed(tmp_path), self_signed(tmp_path / "other")

    def ask(service: Service, url: str) -> None:
        assert url.startswith("https://")
        made = JobsClient(url, service.token, cert).post("/jobs", recipe=RECIPE, name="a")
        assert load_recipe(Path(made["folder"]) / "recipe.toml").fleet.tls_cert == cert, "its controller has it, too"
        for ca in (None, other):
            with pytest.raises(WindfallError, match=r"(?s)certificate is not accepted: self-signed.*Set --tls-ca"):
                JobsClient(url, service.token, ca).get("/jobs")
        with pytest.raises(WindfallError, match="does not answer"):
            JobsClient(url.replace("https", "http"), service.token).get("/jobs")
        by_name = url.replace("127.0.0.1", "localhost")
        with pytest.raises(WindfallError, match="certificate is not accepted: Hostname mismatch"):
            JobsClient(by_name, service.token, cert).get("/jobs")
        address = {"url": by_name, "certificate": cert.read_text()}
        (tmp_path / "address.json").write_text(json.dumps(address))
        assert JobsClient(str(tmp_path), None).get("/jobs/a")["state"] == "queued", "its folder says which it is"
        monkeypatch.setenv("WINDFALL_TLS_PIN", cert.read_text())
        assert JobsClient(by_name, service.token).get("/jobs/a")["state"] == "queued"

    asked(tmp_path, ask, tls_cert=cert, tls_key=key)


def test_machine_with_a_wrong_token_does_not_join(tmp_path: Path) -> None:
    def ask(service: Service, url: str) -> None:
        client = JobsClient(url, "0123456789abcdef")
        machine = JoinedMachine(client, "m", SETTINGS, tmp_path)
        with pytest.raises(WindfallError, match="this token is not known"):
            asyncio.run(machine._report())
        assert service.machines.names == []

    asked(tmp_path, ask)


def test_devices_of_a_machine_have_holders_and_turns(tmp_path: Path) -> None:
    """A report that is lost loses nothing; one that is repeated doubles nothing, also over a kill of the service."""
    now_s = time.time()
    slow_clock = {"now_s": now_s - 5000.0, "price_usd_per_h": 1.0, "times": {"gpu0": {"a": 10**9, "": 10**9}}}
    held = {"job": "a", "kind": "train", "beside": "", "waiting": [{"job": "b", "kind": "rollout", "for_s": 1.5}]}

    def ended(*numbers: int) -> list[dict[str, Any]]:
        return [turn("gpu0", "a", "rollout", now_s - 5000.0 - 20.0 + n, 0.5) for n in numbers]

    def ask(service: Service, url: str) -> None:
        client = JobsClient(url, service.token)
        client.post("/jobs", recipe=RECIPE, name="a")
        report = {"life": "x", "devices": {"gpu0": held}, **slow_clock}
        assert client.post("/machines/m", first_turn=0, turns=ended(0, 1, 2), **report)["turns"] == 3
        assert client.post("/machines/m", first_turn=0, turns=ended(0, 1, 2, 3), **report)["turns"] == 4
        device = client.get("/jobs")["devices"]["m/gpu0"]
        assert (device["job"], device["kind"], device["used_s"]) == ("a", "train", {"a": 1.0})
        assert (service._waits("a"), service._waits("b")) == ("", "its turn on m/gpu0")
        text = table.table(client.get("/jobs"))
        assert "m/gpu0" in shown(text)
        assert "a trains" in shown(text)

    def ask_again(service: Service, url: str) -> None:
        client = JobsClient(url, service.token)
        assert client.get("/jobs")["devices"].get("m/gpu0", {"job": ""})["job"] == "", "it has not reported yet"
        report = {"life": "x", **slow_clock}
        assert client.post("/machines/m", first_turn=2, turns=ended(2, 3, 4), **report)["turns"] == 5
        assert client.post("/machines/m", first_turn=9, turns=ended(9), **report)["turns"] == 10, "older ones are gone"
        for odd in ({"kind": "dance"}, {"start_s": "x"}, {"device": 1}):
            turns = [{**ended(10)[0], **odd}]
            with pytest.raises(WindfallError, match="invalid request"):
                client.post("/machines/m", first_turn=10, turns=turns, **report)

    asked(tmp_path, ask)
    asked(tmp_path, ask_again)
    lines = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert [(line["device"], line["number"]) for line in lines] == [("m/gpu0", n) for n in (0, 1, 2, 3, 4, 9)]
    for line in lines:
        assert line["start_s"] - now_s == pytest.approx(line["number"] - 20.0, abs=1.0), "on the clock of the service"
    history = ServiceFiles(tmp_path)
    history.read()
    assert list(history.history.changes(60.0, 0, now_s)) == ["m/gpu0"]


def test_another_process_of_a_machine_is_let_in_when_the_first_one_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(service: Service, url: str) -> None:
        client = JobsClient(url, service.token)

        def report(life: str, s: int) -> None:
            client.post("/machines/m", life=life, times={"gpu0": {"": s * 10**9}}, price_usd_per_h=3600.0)

        report("first", 10)
        with pytest.raises(RequestRefused, match="another machine has joined as 'm'") as refused:
            report("second", 1)
        assert refused.value.status == join.NAME_IN_USE
        monkeypatch.setattr(machines, "REPLACED_S", 0.0)
        report("second", 1)
        report("second", 5)
        with pytest.raises(RequestRefused, match="another machine has joined as 'm'"):
            report("first", 20)  # it was silent, not dead; its time was moved
        assert service.bill.machines["m"].times() == {"gpu0": {"": 15 * 10**9}}

    asked(tmp_path, ask)


def test_turns_that_do_not_fit_onto_the_disk_are_not_confirmed(tmp_path: Path) -> None:
    turns = [turn("m/gpu0", "a", "train", 1000.0 + n, 0.5) for n in range(3)]
    log = TurnLog(tmp_path / "turns.jsonl")
    (tmp_path / "turns.jsonl").symlink_to("/dev/full")
    assert log.add_reported("x", 0, turns) == 0
    (tmp_path / "turns.jsonl").unlink()
    assert log.add_reported("x", 0, turns) == 3
    assert log.add_reported("x", 0, turns) == 3
    log.close()
    assert len((tmp_path / "turns.jsonl").read_text().splitlines()) == 3


def test_job_that_waits_for_its_turn_says_so(tmp_path: Path) -> None:
    service = Service(SETTINGS.model_copy(update={"folder": tmp_path}), lambda line: None)
    free = {"job": "", "kind": "", "beside": "", "waiting": []}
    service._devices = {"cpu0": {**free, "job": "a", "waiting": [{"job": "b"}]}, "cpu1": {**free, "job": "c"}}
    assert [service._waits(name) for name in "abc"] == ["", "its turn on cpu0", ""]
