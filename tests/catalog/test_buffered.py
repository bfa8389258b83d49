from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.apply import append, append_all
from catalog.buffered import BufferedTable
from catalog.environment import Environment
from catalog.snapshot import Snapshot
from tests.catalog.harness import Catalog, add_base
from wire.events import Split
from wire.registrar import ChangeLabels, MoveChannel, RenamePolicy

KEYS = st.sampled_from([b"a", b"ab", b"b", b"c"])
STEPS = st.lists(st.tuples(st.sampled_from(["put", "delete", "get", "scan", "flush"]), KEYS), max_size=40)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_a_buffered_table_reads_as_a_dictionary_does(tmp_path_factory: pytest.TempPathFactory, steps: object) -> None:
    folder = tmp_path_factory.mktemp("buffered")
    model: dict[bytes, str] = {}
    environment = Environment.create(folder, map_bytes=1 << 22, durable=False)
    with closing(environment), environment.begin(write=True) as txn:
        table = BufferedTable(environment.tables.key_ids)
        for number, (step, key) in enumerate(steps):  # type: ignore[arg-type, var-annotated]
            match step:
                case "put":
                    table.put(txn, key, str(number))
                    model[key] = str(number)
                case "delete":
                    table.delete(txn, key)
                    model.pop(key, None)
                case "get":
                    assert table.get(txn, key) == model.get(key)
                case "scan":
                    expected = sorted(item for item in model.items() if item[0].startswith(key))
                    assert list(table.scan(txn, prefix=key)) == expected
                case "flush":
                    table.flush(txn)
        table.flush(txn)
        assert list(environment.tables.key_ids.scan(txn)) == sorted(model.items())


def test_one_batch_of_events_leaves_the_bytes_that_one_event_at_a_time_leaves(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.run(add_base())
    for number in range(4):
        catalog.publish("acme/a", b"revision %d" % number)
        catalog.publish("acme/b", b"revision %d" % (number % 2))
    catalog.run(MoveChannel(policy="acme/a", channel="canary", target=(Split(1), Split(2, 3))))
    catalog.run(ChangeLabels(policy="acme/b", labels={"team": "search"}))
    catalog.run(RenamePolicy(policy="acme/b", to="acme/c"))
    with catalog.environment.begin() as txn:
        events = list(Snapshot(txn, catalog.environment.tables).journal(after=0))
    dumps = []
    for name, size in (("batch", len(events)), ("single", 1)):
        with closing(Environment.create(tmp_path / name, map_bytes=1 << 24, durable=False)) as environment:
            for start in range(0, len(events), size):
                with environment.begin(write=True) as txn, Snapshot.writing(txn, environment.tables) as view:
                    append_all(view, events[start : start + size])
            dumps.append(dump(environment))
    with closing(Environment.create(tmp_path / "plain", map_bytes=1 << 24, durable=False)) as environment:
        with environment.begin(write=True) as txn:
            for event in events:
                append(Snapshot(txn, environment.tables), event)
        dumps.append(dump(environment))
    assert dumps[0] == dumps[1] == dumps[2] == dump(catalog.environment)
    catalog.close()


def dump(environment: Environment) -> dict[str, list[tuple[bytes, bytes]]]:
    with environment.begin() as txn:
        return {name: list(txn.cursor(db=table.handle)) for name, table in environment.tables.named().items()}
