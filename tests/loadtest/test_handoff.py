"""The handoff's arithmetic, the stock way's weights, and the whole of it on real parts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadtest import handoff
from loadtest.handoff import Measured, Plan
from loadtest.handoff.merged import Reload, _without_adapters
from loadtest.handoff.taught import Handoff, stages_of
from loadtest.pack import write_adapter
from packer.peft import pack_peft
from packer.revision import RevisionFile
from packer.shape import BaseShape
from tests.loadtest.tiny import tiny_base
from wire.outcomes import EngineFailed


def handed(save_s: float, first_token_s: float, warm_s: float) -> Handoff:
    return Handoff(save_s, first_token_s, [warm_s] * 3, sample_s=0.2, warm_sample_s=0.1)


def test_ratios_are_of_one_round_each() -> None:
    rounds = [[handed(0.3, 0.1, 0.1)] * 3, [handed(0.5, 0.3, 0.1)] * 3]
    found = Measured(handoffs=rounds, restarts=[Reload(1.0, 18.0, 1.0), Reload(2.0, 29.0, 1.0)])
    summary = found.summary()
    assert summary["merge_over_ours"] == 45.0
    assert summary["first_token_extra_s"] == 0.5
    assert summary["first_token_extra_max_s"] == 0.7
    assert summary["merge_reload_s"] == 26.0


def test_what_the_engine_cannot_do_is_absent() -> None:
    found = Measured(handoffs=[[handed(0.3, 0.1, 0.1)]], restarts=[], refused="no such route")
    assert not {"merge_reload_s", "merge_over_ours", "merge_reload_in_place_s"} & found.summary().keys()


def test_stages_are_read_from_the_services_log(tmp_path: Path) -> None:
    log = tmp_path / "training.log"
    told = (
        "2026-11-30 INFO gateway.training.publishing: default/taught@{}, 19573696 bytes: export_s={} event_s=0.0344\n"
    )
    log.write_text(told.format(1, 0.5) + told.format(11, 0.25) + "default/taught@2 is sampled\n")
    assert stages_of(log, "default/taught@1") == {"export_s": 0.5, "event_s": 0.0344}
    with pytest.raises(EngineFailed, match="says nothing of default/taught@2"):
        stages_of(log, "default/taught@2")
    staged = msgspec.structs.replace(handed(0.3, 0.1, 0.1), stages={"export_s": 0.2})
    assert Measured(handoffs=[[staged]]).summary()["stage_export_s"] == 0.2


def test_the_stock_engine_is_started_without_adapters() -> None:
    argv = ("python", "--model", "m", "--enable-lora", "--max-loras", "4", "--max-cpu-loras", "8", "--dtype", "auto")
    assert _without_adapters(argv) == ("python", "--model", "m", "--dtype", "auto")


def test_a_merge_is_what_peft_makes_of_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    from loadtest.handoff.merging import merge

    base = tiny_base(tmp_path / "base").folder
    write_adapter(tmp_path / "adapter", BaseShape.from_config((base / "config.json").read_bytes()), 3)
    with (tmp_path / "revision").open("wb") as out:
        pack_peft(tmp_path / "adapter", BaseShape.from_config((base / "config.json").read_bytes()), out)
    weights = load_file(base / "model.safetensors")
    merge(base, weights, RevisionFile.open(tmp_path / "revision"), tmp_path / "merged")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    expected = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    assert ours.keys() == expected.keys()
    changed = 0
    for name, value in expected.items():
        assert ours[name].dtype == weights.get(name, ours[name]).dtype
        # PEFT adds in fp32, and what is merged is rounded to the base's own dtype
        assert (ours[name].float() - value).abs().max() <= 0.004 * value.abs().max(), name
        changed += name in weights and bool((ours[name] != weights[name]).any())
    assert changed == 2 * 7


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_handoff_on_real_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(handoff, "make_base", lambda device, folder, seed: tiny_base(folder))
    monkeypatch.setattr(handoff, "SMALL", Plan(rounds=1, handoffs=2))
    plot = tmp_path / "handoff.svg"
    summary = handoff.run(tmp_path / "handoff.json", small=True, seed=1, device="cpu", plot=plot)
    report = msgspec.json.decode((tmp_path / "handoff.json").read_bytes())
    assert report["summary"] == summary
    assert report["environment"]["stand_in"] == {"weights": "random"}
    assert summary.keys() >= {"publish_to_first_token_s", "warm_first_token_s", "first_token_extra_s"}
    assert summary["merge_over_ours"] > 1 < summary["merge_in_place_over_ours"]
    assert report["samples"]["refused"] == ""
    assert "<svg" in plot.read_text()
