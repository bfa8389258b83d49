from __future__ import annotations

from pathlib import Path

from ops.engine_log import engine_cause, root_cause

LOG = """\
(APIServer pid=1) WARNING 11-30 12:06:55 [system_utils.py:255] Too low. This can cause `OSError: too many files`.
(EngineCore pid=2) ERROR 11-30 12:07:01 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-30 12:07:01 [core.py:1510]     raise ValueError(
(EngineCore pid=2) ERROR 11-30 12:07:01 [core.py:1510] ValueError: Available memory on node 0 is too small.
ValueError: Available memory on node 0 is too small.
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_first_exception_is_the_cause() -> None:
    assert root_cause(LOG) == "ValueError: Available memory on node 0 is too small."


def test_what_pydantic_found_is_told_too() -> None:
    log = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, too long\n"
    assert root_cause(log).endswith("for ModelConfig Value error, too long")


def test_a_log_without_an_exception_has_no_cause() -> None:
    assert root_cause("loading\nready\n") == ""


def test_the_log_before_is_read_when_the_engine_was_started_anew(tmp_path: Path) -> None:
    log = tmp_path / "engine-smol.log"
    assert engine_cause(log) == ""
    log.with_suffix(".log.1").write_text(LOG)
    log.write_text("loading\n")
    assert engine_cause(log).startswith("ValueError: Available memory")
