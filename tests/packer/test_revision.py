"""A revision file is read only if it is exactly what the packer would have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from packer.modules import Place
from packer.revision import ALIGN, RevisionFile, check_fit
from packer.shape import BaseShape
from tests.packer.adapters import config_for, packed, rewritten_header, shape_of, tensors_for, write_folder
from wire.outcomes import ArtifactUnavailable, InvalidRequest, RoostError, Unfit


def test_the_stock_library_reads_it(revision: bytes, shape: BaseShape, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    path.write_bytes(revision)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("layers.2.down.B").shape == (16, 4)
        manifest = json.loads(file.metadata()["roost"])
    assert manifest == {
        "format": 1, "rank": 4, "alpha": 8, "rslora": False, "targets": ["q", "k", "v", "o", "gate", "up", "down"],
    }  # fmt: skip


def test_layers_follow_each_other_and_data_is_aligned(shape: BaseShape, tmp_path: Path) -> None:
    deep = shape_of(num_hidden_layers=12)
    file = RevisionFile(packed(write_folder(tmp_path / "a", tensors_for(deep), config_for()), deep))
    assert file.data_start % ALIGN == 0
    starts = [spec.data_offsets[0] for spec in file.specs.values()]
    assert starts == sorted(starts)
    layers = [int(name.split(".")[1]) for name in file.specs]
    assert layers == sorted(layers)
    assert list(file.specs)[:4] == ["layers.0.q.A", "layers.0.q.B", "layers.0.k.A", "layers.0.k.B"]


def test_tensors_digest_and_facts_come_from_the_bytes(revision: bytes) -> None:
    file = RevisionFile(revision)
    assert bytes(file.tensor("layers.1.up.A")) == load(revision)["layers.1.up.A"].numpy().tobytes()
    assert file.digest() == blake3.blake3(revision).hexdigest()
    assert file.facts("d" * 64).digest == "d" * 64
    with pytest.raises(KeyError):
        file.tensor("layers.9.up.A")


def test_a_mapped_file_is_the_same(revision: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(revision)
    assert RevisionFile.open(path).facts() == RevisionFile(revision).facts()
    path.write_bytes(b"")
    with pytest.raises(InvalidRequest, match="empty"):
        RevisionFile.open(path)
    with pytest.raises(ArtifactUnavailable):
        RevisionFile.open(tmp_path / "absent")


def test_exceptions_are_recorded_where_they_hold(shape: BaseShape, tmp_path: Path) -> None:
    config = config_for(
        rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8, "down_proj": 4},
        alpha_pattern={r".*\.mlp\..*": 3.5, "o_proj": 8.0},
        use_rslora=True,
    )
    tensors = tensors_for(shape, ranks={"q": 2, "layers.1.up": 8})
    file = RevisionFile(packed(write_folder(tmp_path / "a", tensors, config), shape))
    assert file.manifest.ranks == {"q": 2, "layers.1.up": 8}
    assert file.manifest.alphas == {"gate": 3.5, "up": 3.5, "down": 3.5}
    pairs = {pair.place: pair for pair in file.pairs}
    assert file.scale(pairs[Place(1, "up")]) == 3.5 / 8**0.5
    assert file.scale(pairs[Place(0, "up")]) == 3.5 / 4**0.5
    assert file.scale(pairs[Place(0, "q")]) == 8 / 2**0.5
    assert file.facts().rank == 8


def test_fit_is_judged_against_the_base(revision: bytes, shape: BaseShape) -> None:
    file = RevisionFile(revision)
    check_fit(file, shape)
    check_fit(file, shape, max_rank=4)
    with pytest.raises(Unfit, match="rank 4, above the largest served: 3"):
        check_fit(file, shape, max_rank=3)
    with pytest.raises(Unfit, match=r"layers\.2\.q is no module of the base"):
        check_fit(file, shape_of(num_hidden_layers=2))
    with pytest.raises(Unfit, match=r"layers\.0\.gate adapts 16 -> 24"):
        check_fit(file, shape_of(intermediate_size=20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_do_not_fit(dtype: torch.dtype, shape: BaseShape, tmp_path: Path) -> None:
    good = packed(write_folder(tmp_path / "a", tensors_for(shape, dtype=dtype), config_for()), shape)
    file = RevisionFile(good)
    end = file.data_start + file.specs["layers.1.v.B"].data_offsets[1]
    for value in (float("nan"), float("inf"), float("-inf")):
        bad = bytearray(good)
        raw = torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().tobytes()
        bad[end - len(raw) : end] = raw
        with pytest.raises(InvalidRequest, match=r"layers\.1\.v\.B holds a value that is not finite"):
            check_fit(RevisionFile(bytes(bad)), shape)


def test_a_claim_of_half_precision_is_checked(shape: BaseShape, tmp_path: Path) -> None:
    good = packed(write_folder(tmp_path / "a", tensors_for(shape, dtype=torch.float16), config_for()), shape)
    check_fit(RevisionFile(good), shape)
    bad = bytearray(good)
    bad[-4:] = torch.tensor([1e30]).numpy().tobytes()
    with pytest.raises(InvalidRequest, match=r"layers\.2\.down\.B holds a value that F16 can't hold"):
        check_fit(RevisionFile(bytes(bad)), shape)


def with_manifest(**changes: Any) -> Callable[[bytes], bytes]:
    def change(header: dict[str, Any]) -> None:
        manifest = {**json.loads(header["__metadata__"]["roost"]), **changes}
        header["__metadata__"]["roost"] = json.dumps(manifest, sort_keys=True, separators=(",", ":"))

    return lambda file: rewritten_header(file, change)


def renamed(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda file: rewritten_header(
        file, lambda header: {new if name == old else name: entry for name, entry in header.items()}
    )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: b"", "too short"),
        (lambda file: file[:-1], "truncated"),
        (lambda file: file + b"\0", "after its last tensor"),
        (lambda file: save(load(file)), "not a revision file"),
        (lambda file: save(load(file), metadata={"roost": "{"}), "manifest is malformed"),
        (lambda file: save(load(file), metadata={"roost": "[" * 100_000}), "manifest is malformed"),
        (lambda file: rewritten_header(file, lambda header: None), "not spelt as"),
        (with_manifest(format=2), "format 2"),
        (with_manifest(future=1), "manifest is malformed"),
        (with_manifest(rank="4"), "manifest is malformed"),
        (with_manifest(rank=5), "rank unlike the manifest's"),
        (with_manifest(rank=0), "rank outside"),
        (with_manifest(ranks={"q": 1 << 40}), "rank outside"),
        (with_manifest(ranks={"q": 3}), "rank unlike the manifest's"),
        (with_manifest(alpha=1e300), "unusable alpha"),
        (with_manifest(alpha=8.0), "unusable alpha"),
        (with_manifest(alpha=None), "manifest is malformed"),
        (with_manifest(alphas={"q": 8}), "not spelt as"),
        (with_manifest(alphas={"experts": 3}), "not spelt as"),
        (with_manifest(targets=["q"]), "not spelt as"),
        (with_manifest(source="F8"), "unknown dtype 'F8'"),
        (with_manifest(prefix="../"), "prefix"),
        (renamed("layers.0.q.A", "layers.0.z.A"), "'layers.0.z.A' names no tensor"),
        (renamed("layers.0.q.A", "layers.00.q.A"), "names no tensor"),
        (renamed("layers.0.q.A", "layers.99999.q.A"), "names no tensor"),
        (renamed("layers.0.q.A", "layers.7.q.A"), "is missing"),
        (renamed("layers.0.q.A", "layers.0.q.A" + "x" * 10_000), "names no tensor"),
    ],
)
def test_what_is_not_exactly_a_revision_is_refused(
    spoil: Callable[[bytes], bytes], reason: str, revision: bytes
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        RevisionFile(spoil(revision))
    assert reason in refused.value.message
    assert len(refused.value.message) < 400


def test_a_header_of_other_order_is_refused(revision: bytes) -> None:
    other = save(load(revision), metadata={"roost": RevisionFile(revision).manifest.encode()})
    with pytest.raises(InvalidRequest, match="not spelt as"):
        RevisionFile(other)


@settings(max_examples=300)
@given(data=st.data())
def test_a_mutated_revision_is_read_or_refused(data: st.DataObject, revision: bytes, shape: BaseShape) -> None:
    file = bytearray(revision)
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    file = file[: data.draw(st.sampled_from([len(file), len(file) - 1, 6000, 100, 7]))]
    try:
        check_fit(RevisionFile(bytes(file)), shape)
    except RoostError as refused:
        assert refused.message


def test_a_header_that_is_known_is_held_against_each_files_own_data(revision: bytes) -> None:
    first = RevisionFile(revision)
    with pytest.raises(TypeError, match="does not support item assignment"):
        first.specs["layers.0.q.A"] = first.specs["layers.0.q.B"]  # type: ignore[index]
    other = bytearray(revision)
    other[first.data_start :] = bytes(len(revision) - first.data_start)
    second = RevisionFile(bytes(other))
    assert second.content == first.content
    assert not any(second.tensor("layers.0.q.A"))
    assert any(first.tensor("layers.0.q.A"))
    assert second.digest() != first.digest()
    for cut, reason in ((revision[:-4], "truncated"), (revision + bytes(4), "after its last tensor")):
        with pytest.raises(InvalidRequest, match=reason):
            RevisionFile(cut)
    assert RevisionFile(revision).facts() == first.facts()


def test_more_layouts_than_are_kept_are_told_apart(shape: BaseShape, tmp_path: Path) -> None:
    for alpha in range(1, 40):
        folder = write_folder(tmp_path / str(alpha), tensors_for(shape, 2), config_for(2, lora_alpha=alpha))
        file = RevisionFile(packed(folder, shape))
        assert {pair.alpha for pair in file.pairs} == {alpha}
