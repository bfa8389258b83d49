"""What the demo hands on to the mesh that it starts."""

from __future__ import annotations

from ops.demo.__main__ import without_settings


def test_settings_stay_out_and_where_sglang_is_goes_on() -> None:
    given = {"PATH": "/bin", "ROOST_GATEWAY__PORT": "1", "ROOST_API_KEY": "k", "ROOST_SGLANG_PYTHON": "/s/python"}
    assert without_settings(given) == {"PATH": "/bin", "ROOST_SGLANG_PYTHON": "/s/python"}
