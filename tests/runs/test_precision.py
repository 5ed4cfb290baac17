"""``precision: auto`` is decided once for a run, by the device that it begins on."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flsuite.federation.client import devices as module
from flsuite.federation.client.devices import cpu_has_bf16, resolve_precision
from flsuite.runs.preparation import worker_setup
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, state, table, trainer


def on_cpu(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    monkeypatch.setattr(module, "cpu_has_bf16", lambda: has_bf16)


def recorded(run_dir: Path) -> str | None:
    return yaml.safe_load((run_dir / "settings.yaml").read_text())["client"].get("precision")


def last_round(made: FederatedTrainer) -> dict[Any, float]:
    return {name: value for name, value in table(made).items() if name[0] == made.round}


def fitted(ckpt_path: str | None = None, **kwargs: Any) -> FederatedTrainer:
    made = trainer(**{"precision": "auto", "rounds": 1, **kwargs})
    made.fit(classifier(), digits(2, train_samples=100), ckpt_path=ckpt_path)
    return made


@pytest.mark.parametrize(
    ("onednn", "cpuid", "machine", "limit", "expected"),
    [
        (True, True, "x86_64", "", True),
        (True, True, "x86_64", "AVX512_CORE_AMX", True),
        (True, True, "x86_64", "avx512_core", False),
        (True, False, "x86_64", "", False),  # AVX-512 alone, which oneDNN emulates with
        (False, True, "x86_64", "AVX2", False),
        (True, False, "aarch64", "", True),
        (False, False, "arm64", "", False),
    ],
)
def test_a_cpu_has_bf16_if_onednn_may_use_its_instructions(
    onednn: bool, cpuid: bool, machine: str, limit: str, expected: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpuid)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert cpu_has_bf16() is expected


@pytest.mark.long
def test_the_limit_of_onednn_is_seen() -> None:
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = "from flsuite.federation.client.devices import cpu_has_bf16; print(cpu_has_bf16())"
    child = [sys.executable, "-c", command]
    assert subprocess.check_output(child, env={**os.environ, **limits}) == b"False\n"


@pytest.mark.parametrize(
    ("arguments", "gpus", "expected"),
    [
        ({}, 0, "32-true"),
        ({"accelerator": "cpu"}, 1, "32-true"),
        ({}, 1, "bf16-mixed"),
        ({"accelerator": "gpu", "devices": 1}, 2, "bf16-mixed"),
    ],
)
def test_the_device_that_trains_decides(
    arguments: dict[str, Any], gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch, False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert resolve_precision("auto", arguments)[0] == expected
    for explicit in (None, 32, "32-true", "bf16-mixed"):
        assert resolve_precision(explicit, arguments)[0] == explicit


@pytest.mark.parametrize(("has_bf16", "taken"), [(True, "bf16-mixed"), (False, "32-true")])
def test_auto_is_what_it_takes(
    has_bf16: bool,
    taken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on_cpu(monkeypatch, has_bf16)
    caplog.set_level("INFO", "flsuite")
    auto = fitted(run_dir=str(tmp_path / "auto"))
    lines = [line for line in caplog.messages if "precision" in line]
    assert len(lines) == 1 and lines[0].startswith(f"precision: {taken} (auto: this CPU has")
    assert auto.precision == taken and recorded(tmp_path / "auto") == taken

    # Workers anywhere get what this process has decided.
    assert worker_setup(auto, auto.run).trainer_kwargs["precision"] == taken

    explicit = fitted(precision=taken, run_dir=str(tmp_path / "explicit"))
    assert equal_states(state(auto), state(explicit)) and table(auto) == table(explicit)


@pytest.mark.parametrize("began", ["auto", None])
def test_a_resume_keeps_the_precision_of_the_run(
    began: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch, True)
    whole = fitted(precision=began, rounds=2)
    fitted(precision=began, run_dir=str(tmp_path))
    on_cpu(monkeypatch, False)  # the cluster has moved the job

    resumed = fitted("last", rounds=2, run_dir=str(tmp_path))
    assert equal_states(state(whole), state(resumed))
    assert last_round(whole) == last_round(resumed)
    assert recorded(tmp_path) == (began and "bf16-mixed")

    scored = trainer(precision="auto", run_dir=str(tmp_path))
    scores = scored.test(classifier(), digits(2, train_samples=100))
    assert scores == whole.test() and scored.precision == whole.precision
    assert fitted(rounds=1).precision == "32-true"  # a new run takes what is here


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_precision_that_a_cpu_emulates_is_one_warning(
    precision: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_cpu(monkeypatch, False)
    fitted(precision=precision)
    (line,) = [line for line in caplog.messages if precision in line]
    assert line.endswith("set precision to auto or 32-true")

    caplog.clear()
    on_cpu(monkeypatch, True)
    fitted(precision=precision)
    assert not [line for line in caplog.messages if precision in line]
