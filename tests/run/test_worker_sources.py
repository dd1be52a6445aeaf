"""From recipe sections to providers and to text: the preview, checks before the start, and limits of autoscaling."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from windfall.errors import WindfallError
from windfall.providers.job_queue import JobProvider
from windfall.providers.kubernetes.provider import KubernetesProvider
from windfall.providers.ray.provider import RayProvider
from windfall.providers.worker_command import arguments
from windfall.recipe.file import dump_recipe, parse_recipe
from windfall.recipe.sections import Recipe
from windfall.run import worker_sources

FLEET: dict[str, Any] = {
    "host": "0.0.0.0", "port": 8700, "weights_port": 8701,
    "ray": {"labels": {"ray.io/accelerator-type": "H100"}, "workers_max": 16},
    "kubernetes": {"image": "windfall:1", "workers": 2, "kubeconfig": "/k"},
    "skypilot": {"accelerators": "H100:1", "region": "aws/us-east-1"},
    "slurm": {"partition": "spot", "workers": 3, "price_usd_per_h": 0.5},
}  # fmt: skip


def recipe(**fleet: Any) -> Recipe:
    return Recipe.model_validate({"run": {"name": "demo"}, "fleet": {**FLEET, **fleet}})


def only(name: str, **changes: Any) -> Recipe:
    """A recipe with one source."""
    fleet = {key: value for key, value in FLEET.items() if not isinstance(value, dict)}
    section = {key: changes.pop(key) for key in ("join_url",) if key in changes}
    return Recipe.model_validate({"fleet": {**fleet, **changes, name: {**FLEET[name], **section}}})


def test_preview_shows_every_source_and_starts_nothing(
    windfall: Callable[..., tuple[int, str, str]], here: Path
) -> None:
    (here / "r.toml").write_text(dump_recipe(recipe()))
    code, out, err = windfall("fleet", "preview", "r.toml")
    assert (code, err) == (0, "")
    assert '"label_selector": {\n      "ray.io/accelerator-type": "H100"' in out
    assert "# ray: 1 worker, at most 16" in out
    assert "#SBATCH --array=1-3" in out
    assert '"use_spot": true' in out
    assert "terminationGracePeriodSeconds: 45" in out
    assert "http://windfall-demo-0.windfall-demo:8700" in out
    assert not (here / "runs").exists()
    assert windfall("fleet", "preview", "small.toml")[0] == 2


def test_each_part_of_the_preview_is_what_its_system_reads(tmp_path: Path) -> None:
    manifests = list(yaml.safe_load_all(worker_sources.preview(only("kubernetes"))))
    kinds = [m["kind"] for m in manifests if m]
    assert sorted(kinds) == ["Deployment", "PriorityClass"]
    assert (
        worker_sources.preview(recipe(), "slurm")
        == worker_sources.preview(recipe()).partition("# slurm")[1]
        + (worker_sources.preview(recipe()).partition("# slurm")[2])
    )
    assert yaml.safe_load(worker_sources.preview(only("skypilot")))["run"].endswith("\n")
    lines = worker_sources.preview(only("ray")).splitlines()
    shown = json.loads("\n".join(line for line in lines if not line.startswith("#")))
    assert shown["actor"]["num_gpus"] == 1.0
    (tmp_path / "w.sh").write_text(worker_sources.preview(only("slurm")))
    assert subprocess.run(["bash", "-n", tmp_path / "w.sh"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("source", "changes", "expected"),
    [
        ("slurm", {"host": "127.0.0.1"}, "lets no other machine connect"),
        ("kubernetes", {"port": 0}, "Set fleet.port and fleet.weights_port"),
        ("slurm", {"join_url": "https://h:1"}, "has no certificate"),
    ],
)
def test_unreachable_controller_is_refused(source: str, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(WindfallError, match=expected):
        worker_sources.preview(only(source, **changes))


def test_missing_software_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for source, expected in (
        ("ray", r"pip install .*\[ray\]"),
        ("skypilot", "pipx install skypilot"),
        ("slurm", "program 'sbatch' not found"),
        ("kubernetes", "program 'kubectl' not found"),
    ):
        with pytest.raises(WindfallError, match=expected):
            worker_sources.check(only(source))


def test_skypilot_needs_a_way_to_install_windfall(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sky").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WindfallError, match=r"new machines would not have windfall\nSet fleet.skypilot.setup"):
        worker_sources.check(only("skypilot"))
    assert "setup" not in yaml.safe_load(worker_sources.preview(only("skypilot")))


def test_run_that_starts_above_the_price_ceiling_is_refused() -> None:
    fleet = {"workers": 2, "price_usd_per_h": 3.0}
    worker_sources.check(Recipe.model_validate({"fleet": {**fleet, "max_usd_per_h": 6.0}}))
    with pytest.raises(WindfallError, match=r"cost \$6 per hour, more than \$5"):
        worker_sources.check(Recipe.model_validate({"fleet": {**fleet, "max_usd_per_h": 5.0}}))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_workers_in_kubernetes_trust_the_certificate_of_the_run(tmp_path: Path) -> None:
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem -subj /CN=windfall"
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    text = worker_sources.preview(only("kubernetes", tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem"))
    made = {m["kind"]: m for m in yaml.safe_load_all(text) if m}
    (container,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    (pin,) = [e["value"] for e in container["env"] if e["name"] == "WINDFALL_TLS_PIN"]
    assert pin.strip() == (tmp_path / "cert.pem").read_text().strip()
    assert "https://windfall-" in " ".join(container["command"])


def test_price_ceiling_needs_prices_and_counts_the_dearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)

    def check(**section: Any) -> None:
        fleet = {"host": "0.0.0.0", "port": 1, "weights_port": 2, "max_usd_per_h": 4.0}
        fleet["skypilot"] = {"setup": "pip install .", **section}
        worker_sources.check(Recipe.model_validate({"fleet": fleet}))

    with pytest.raises(WindfallError, match="price of these workers is not known"):
        check()
    with pytest.raises(WindfallError, match=r"Set fleet.skypilot.on_demand_usd_per_h, or fallback = false"):
        check(price_usd_per_h=1.0)
    with pytest.raises(WindfallError, match=r"cost \$6 per hour"):
        check(price_usd_per_h=1.0, on_demand_usd_per_h=3.0, workers=2)
    check(price_usd_per_h=1.0, on_demand_usd_per_h=3.0)
    check(price_usd_per_h=1.0, fallback=False, workers=4)


def test_engine_of_a_source_reaches_its_workers() -> None:
    made = recipe(ray={"engine": "vllm", "tensor_parallel": 4, "gpus": 4.0}).fleet.ray
    assert made is not None
    assert arguments(made, "http://h:1", "w")[-4:] == ["--engine", "vllm", "--tensor-parallel", "4"]


def test_providers_have_the_types_of_their_sections(tmp_path: Path) -> None:
    async def url() -> str:
        return "http://h:1"

    made = worker_sources.providers(recipe(), tmp_path, "0123456789abcdef", url=url, on_event=lambda *_, **__: None)
    assert {name: type(p) for name, p in made.items()} == {
        "ray": RayProvider, "kubernetes": KubernetesProvider, "skypilot": JobProvider, "slurm": JobProvider,
    }  # fmt: skip
    names = ["ray1.1", "kubernetes-windfall-demo-workers-x", "sky1.1-r17", "slurm2.1-r1", "w1.1", "n1.1"]
    owners = {name: [source for source, p in made.items() if p.owns(name)] for name in names}
    assert owners == {
        "ray1.1": ["ray"], names[1]: ["kubernetes"], "sky1.1-r17": ["skypilot"], "slurm2.1-r1": ["slurm"],
        "w1.1": [], "n1.1": [],
    }  # fmt: skip


def test_autoscaler_has_the_limits_of_the_recipe() -> None:
    a = worker_sources.autoscaler(recipe(workers=1, workers_max=4, price_usd_per_h=2.0))
    limits = {name: (s.count, s.min_count, s.max_count, s.usd_per_h) for name, s in a.sources.items()}
    assert limits == {
        "ray": (1, 0, 16, None), "kubernetes": (2, 0, 0, None), "skypilot": (1, 0, 0, None), "slurm": (3, 0, 0, 0.5),
        "local": (1, 0, 4, 2.0),
    }  # fmt: skip
    assert set(worker_sources.autoscaler(recipe(workers=1), elsewhere=False).sources) == {"local"}


def test_wrong_keys_are_refused_with_the_nearest() -> None:
    with pytest.raises(WindfallError, match="Did you mean 'partition'"):
        parse_recipe({"fleet": {"slurm": {"partitions": "x"}}}, where="r.toml")
    with pytest.raises(WindfallError, match="set kubeconfig instead of server and token_file"):
        parse_recipe({"fleet": {"kubernetes": {"image": "x", "server": "https://k8s"}}}, where="r.toml")
    with pytest.raises(WindfallError, match=r"'fleet\.kubernetes\.image' is missing"):
        parse_recipe({"fleet": {"kubernetes": {}}}, where="r.toml")
    with pytest.raises(WindfallError, match="must be from workers_min = 0 to workers_max = 2"):
        parse_recipe({"fleet": {"ray": {"workers": 3, "workers_max": 2}}}, where="r.toml")
    with pytest.raises(WindfallError, match="must be below the time limit"):
        parse_recipe({"fleet": {"slurm": {"time_limit_min": 1, "warning_s": 60}}}, where="r.toml")
