"""The configuration: what it computes is read as PEFT reads it, and nothing that computes is passed over."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from packer.adapter_config import AdapterConfig
from tests.packer.adapters import config_for, shape_of
from wire.outcomes import InvalidRequest, RoostError, Unfit

NAMES = [f"model.layers.{place.layer}.{module.path}" for place, module in shape_of(num_hidden_layers=12).places()]


def parsed(**changes: Any) -> AdapterConfig:
    return AdapterConfig.parse(json.dumps(config_for(**changes)).encode())


def test_everything_that_peft_writes_by_default_is_accepted(tmp_path: Any) -> None:
    peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", r=5, lora_alpha=7).save_pretrained(tmp_path)
    config = AdapterConfig.parse((tmp_path / "adapter_config.json").read_bytes())
    assert (config.rank, config.alpha, config.rslora, config.targets) == (5, 7, False, ("q_proj",))


@pytest.mark.parametrize(
    "field",
    [
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"trainable_token_indices": [1]},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"layer_replication": [[0, 1]]},
        {"megatron_config": {"a": 1}},
        {"loftq_config": {"loftq_bits": 4}},
        {"alora_invocation_tokens": [1, 2]},
        {"use_qalora": True},
        {"use_bdlora": {"target_modules_bd_a": []}},
        {"bias": "all"},
        {"peft_type": "IA3"},
        {"peft_type": None},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "lora_ga"},
        {"a_field_of_tomorrow": 3},
    ],
)
def test_a_feature_that_is_not_served_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(Unfit) as refused:
        parsed(**field)
    (name,) = field
    assert refused.value.field == name
    assert name in refused.value.message


@pytest.mark.parametrize(
    "field",
    [
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"a_field_of_tomorrow": None},
        {"another_of_tomorrow": []},
        {"lora_dropout": 0.5, "inference_mode": True, "peft_version": "99"},
    ],
)
def test_what_computes_nothing_is_accepted(field: dict[str, Any]) -> None:
    assert parsed(**field).rank == 4


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": 4.0}, "r is 4.0"),
        ({"r": True}, "r is true"),
        ({"r": 10**9}, "rank from 1"),
        ({"r": None}, "r is null"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"lora_alpha": 10**4000}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "layers_to_transform"),
        ({"layers_to_transform": ["x"]}, "layers_to_transform"),
        ({"layers_to_transform": [-1]}, "layers_to_transform"),
    ],
)
def test_a_malformed_field_is_refused_by_name(field: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        parsed(**field)
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"r": 1, "r": 2}',
        b'{"r": NaN}',
        b'{"task_type": "\\ud800"}',
        b'{"a":' * 9999,
        b" " * (5 << 20),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        AdapterConfig.parse(raw)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["proj"]},
        {"target_modules": ["self_attn.v_proj", "mlp.down_proj"]},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "o_proj"], "layers_to_transform": [2, 11]},
        {"target_modules": ["q_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 10], "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 10], "layers_pattern": ["h", r"lay\w+"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": r"(?i)MODEL.*_PROJ"},
        {"target_modules": r"model\.layers\.1[01]?\..*"},
        {"target_modules": "q_proj"},
        {"target_modules": r"^(?!.*mlp).*proj$"},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["layers.3.self_attn.q_proj", "up_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.[3-5]\..*"},
        {"target_modules": ["q_proj"], "exclude_modules": "q_proj"},
    ],
)  # fmt: skip
def test_modules_are_selected_as_peft_selects_them(fields: dict[str, Any]) -> None:
    theirs = peft.LoraConfig(**fields)
    wanted = [name for name in NAMES if check_target_module_exists(theirs, name)]
    assert parsed(**fields).selected(NAMES, linear=NAMES) == wanted


def test_all_linear_is_every_linear_module_but_the_excluded() -> None:
    config = parsed(target_modules="all-linear", exclude_modules=["k_proj"])
    assert config.selected([*NAMES, "lm_head"], linear=NAMES) == [name for name in NAMES if "k_proj" not in name]


PATTERNS = st.dictionaries(
    st.sampled_from([
        "q_proj", "proj", "self_attn.q_proj", "model.layers.1.self_attn.q_proj", r"layers\.1\..*", "^q_proj",
        r"^model\.layers\.\d\.mlp\.up_proj", "layers.1", r".*", "(q|k)_proj", r"[0-9]\.mlp\.down_proj", "_proj",
        "a)|(b",
    ]),
    st.integers(1, 99),
    max_size=4,
)  # fmt: skip


@given(patterns=PATTERNS)
def test_patterns_count_as_they_count_in_peft(patterns: dict[str, int]) -> None:
    config = parsed(rank_pattern=patterns, alpha_pattern=patterns)
    wanted = [patterns.get(get_pattern_key(patterns.keys(), name)) for name in NAMES]
    assert config.ranks_and_alphas(NAMES) == [(rank or 4, rank or 8) for rank in wanted]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES, st.sampled_from(sorted(config_for())))
def test_any_value_of_any_field_is_read_or_refused(value: Any, field: str) -> None:
    try:
        AdapterConfig.parse(json.dumps({**config_for(), field: value}).encode())
    except RoostError as refused:
        assert refused.message
