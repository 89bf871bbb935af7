"""The command: what it loads, prints and returns."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.testing.families import random_model, tiny_config  # noqa: E402
from kvloom.verification import verify  # noqa: E402
from kvloom.verification.command import verify_command  # noqa: E402


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    logging.disable(logging.WARNING)
    random_model(tiny_config("gpt_oss"), 5, "bfloat16").save_pretrained(tmp_path)
    logging.disable(logging.NOTSET)
    return tmp_path


def run(source: Path | str, **options: Any) -> tuple[int, dict[str, Any]]:
    written: list[str] = []
    code = verify_command(str(source), as_json=True, write=written.append, **options)
    (text,) = written
    values = json.loads(text)
    assert {"verdict", "reason", "boundaries", "kinds"} <= set(values)
    return code, values


def test_a_saved_model(saved: Path) -> None:
    code, values = run(saved, segment=32, block_size=32)
    assert (code, values["verdict"], values["dtype"]) == (0, "exact", "bfloat16")
    assert values["kinds"]["window"]["bytes_restored"]["device"] > 0
    assert values["spread"]["relative"] < 0.05


@pytest.mark.parametrize("what", ["config.json", ""])
def test_a_config_with_random_weights(saved: Path, what: str) -> None:
    (saved / "model.safetensors").unlink()
    code, values = run(saved / what, random_init=True, dtype="float32", seed=3, tokens=120, segment=32, block_size=32)
    assert (code, values["verdict"], values["dtype"]) == (0, "exact", "float32")
    assert (values["seed"], values["tokens"]) == (3, 120)


def test_text_output(saved: Path) -> None:
    written: list[str] = []
    assert verify_command(str(saved), segment=32, block_size=32, write=written.append) == 0
    assert "spread" in written[0]
    assert "window" in written[0]
    assert written[0].splitlines()[-1].startswith("exact: ")


def bad(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    if name == "empty":
        made.mkdir()
    elif name == "broken.json":
        made.write_text('{"model_type": "llama"', encoding="utf-8")
    elif name == "list.json":
        made.write_text("[1, 2]", encoding="utf-8")
    elif name == "binary.json":
        made.write_bytes(bytes(range(256)))
    elif name == "alien.json":
        made.write_text('{"model_type": "alien"}', encoding="utf-8")
    elif name == "hole.json":
        made.write_text('{"hidden_size": 4}', encoding="utf-8")
    return made


@pytest.mark.parametrize(
    "name", ["missing", "empty", "broken.json", "list.json", "binary.json", "alien.json", "hole.json"]
)
@pytest.mark.parametrize("random_init", [True, False])
def test_bad_input_is_one_line_and_code_2(
    tmp_path: Path, name: str, random_init: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code, values = run(bad(tmp_path, name), random_init=random_init)
    assert (code, values["verdict"]) == (2, "unsupported")
    assert values["reason"]
    assert "\n" not in values["reason"]
    assert "Traceback" not in capsys.readouterr().err


def test_bad_options_are_code_2(saved: Path) -> None:
    for options in (
        {"dtype": "int4"},
        {"tokens": 20},
        {"tokens": -1},
        {"tokens": 10**6},
        {"segment": 33},
        {"block_size": 0},
    ):
        code, values = run(saved, **options)
        assert (code, values["verdict"]) == (2, "unsupported"), options
        assert values["reason"], options


def test_a_config_without_weights_is_code_2(saved: Path) -> None:
    code, values = run(saved / "config.json")
    assert code == 2
    assert "--random-init" in values["reason"]


def test_an_unknown_layer_type_is_code_2(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    config["layer_types"][1] = "clairvoyant_attention"
    (saved / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, values = run(saved, random_init=True)
    assert code == 2
    assert "clairvoyant_attention" in values["reason"]


def test_an_unusable_device_is_code_2(saved: Path) -> None:
    for device in ("cuda:99", "abacus"):
        code, values = run(saved, device=device)
        assert code == 2
        assert device in values["reason"]


def test_without_torch_it_names_the_extra(saved: Path) -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom kvloom.verification.command import verify_command\n"
        f"sys.exit(verify_command({str(saved)!r}, as_json=True))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "kvloom[transformers]" in json.loads(done.stdout)["reason"]


def test_an_unsupported_model_is_code_2(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    from dataclasses import replace

    measured = verify.measure_spread
    monkeypatch.setattr(verify, "measure_spread", lambda *a: replace(measured(*a), absolute=1.0))
    code, values = run(saved, segment=32, block_size=32)
    assert (code, values["verdict"]) == (2, "unsupported")
    assert "resumes this model wrongly" in values["reason"]


def test_an_internal_error_is_code_70(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(verify, "fill", explode)
    code, values = run(saved, segment=32, block_size=32)
    assert code == 70
    assert values["reason"] == "internal error: RuntimeError: a bug"


@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid"])
def test_configs_as_transformers_saves_them(family: str, tmp_path: Path) -> None:
    """They hold infinities that only transformers' own reader takes back."""
    tiny_config(family).save_pretrained(tmp_path)
    out: list[str] = []
    code = verify_command(str(tmp_path), random_init=True, segment=32, block_size=32, as_json=True, write=out.append)
    assert (code, json.loads(out[0])["verdict"]) == (0, "exact")


@pytest.mark.parametrize(
    ("options", "says"), [({"sliding_window": 1}, "cannot run"), ({"vocab_size": 2}, "vocabulary")]
)
def test_what_transformers_cannot_run_is_unsupported(options: dict[str, int], says: str, tmp_path: Path) -> None:
    tiny_config("mistral", **options).save_pretrained(tmp_path)
    out: list[str] = []
    code = verify_command(str(tmp_path), random_init=True, segment=32, block_size=32, as_json=True, write=out.append)
    report = json.loads(out[0])
    assert (code, report["verdict"]) == (2, "unsupported")
    assert says in report["reason"]


def test_random_weights_say_what_they_leave_out(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8"}
    (saved / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, values = run(saved, random_init=True, segment=32, block_size=32)
    assert (code, values["verdict"]) == (0, "exact")
    (note,) = values["notes"]
    assert "quantization_config (fp8)" in note
    assert capsys.readouterr().err == f"note: {note}\n"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 10**12}, "random weights of this model take"),
        ({"intermediate_size": 1e30}, "intermediate_size"),
        ({"num_hidden_layers": 10**12}, "layers"),
        ({"head_dim": 10**12}, "head_dim"),
    ],
)
def test_random_weights_of_absurd_sizes(
    saved: Path, values: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    (saved / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
    code, report = run(saved, random_init=True)
    assert (code, report["verdict"]) == (2, "unsupported")
    assert words in report["reason"]
    assert "Traceback" not in capsys.readouterr().err


def test_bad_seeds_and_devices_are_one_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({"seed": 2**64}, {"seed": -1}, {"device": "meta"}):
        written: list[str] = []
        assert verify_command(str(saved), write=written.append, **options) == 2
        assert written == []
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
