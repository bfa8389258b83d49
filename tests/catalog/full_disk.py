"""Run by test_full_disk.py, in a mount namespace of its own: fills a real file system, and says what then happened.

``python -m tests.catalog.full_disk journal|store FOLDER``, with a small file system mounted at FOLDER/small.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from catalog.client import RegistrarClient
from catalog.names import parse_reference
from catalog.replay import check_catalog
from catalog.view import CatalogView
from tests.catalog.harness import BASE, add_base, upload
from tests.catalog.processes import RegistrarProcess
from wire.outcomes import StorageFull
from wire.registrar import AddBase, PublishRevision

FILLER_BYTES = 600_000
LARGE_BYTES = 900_000
ARTIFACT = b"an adapter of some size " * 400


class Scenario:
    """Publishes until the disk under the catalog or the store is full, makes room, and publishes again."""

    def __init__(self, folder: Path, full: str) -> None:
        small = folder / "small"
        (folder / "roomy").mkdir()
        (folder / {"journal": "catalog", "store": "store"}[full]).symlink_to(small)
        (folder / {"journal": "store", "store": "catalog"}[full]).symlink_to(folder / "roomy")
        self.filler = small / "filler"
        self.registrar = RegistrarProcess(folder)
        self.acknowledged: dict[int, str] = {}
        self.refused = 0
        self.count = 0

    async def run(self) -> dict[str, object]:
        self.filler.write_bytes(b"x" * FILLER_BYTES)
        self.registrar.start()
        client = self.registrar.client()
        await client.run(add_base())
        too_much = await self.add_large_base(client)
        while self.refused < 3:
            await self.publish(client)
        published = len(self.acknowledged)
        found = self.look()
        self.filler.unlink()
        for _ in range(3):
            await self.publish(client)
        client.close()
        return {
            "published_before": published,
            "published_after": len(self.acknowledged) - published,
            "refused": self.refused,
            "too_much_at_once": too_much,
            "found_while_full": found,
            "found_after": self.look(),
            "partial": [path.name for path in (self.registrar.store.root / "partial").iterdir()],
            "exit": self.registrar.terminate(),
        }

    async def add_large_base(self, client: RegistrarClient) -> str:
        """A write that the disk takes a part of, which LMDB calls an input/output error."""
        command = AddBase(name="large", fingerprint="f" * 64, path="/m", config=b" " * LARGE_BYTES)
        try:
            await client.run(command)
        except StorageFull:
            return "refused"
        return "added"

    async def publish(self, client: RegistrarClient) -> None:
        self.count += 1
        try:
            facts = upload(self.registrar.store, b"%d %s" % (self.count, ARTIFACT))
            answer = await client.run(PublishRevision(policy="acme/a", artifact=facts, create_over=BASE))
        except StorageFull:
            self.refused += 1
        else:
            self.acknowledged[answer.revision] = answer.digest

    def look(self) -> dict[str, object]:
        """Whether all that was acknowledged, and nothing else, is there."""
        view = CatalogView.open(self.registrar.catalog_dir)
        try:
            revisions = {row.revision: row.artifact.digest for row in view.revisions("acme/a", limit=10_000)}
            latest = view.resolve(parse_reference("acme/a")).revision
        finally:
            view.close()
        for digest in revisions.values():
            self.registrar.store.verify(digest)
        return {
            "exact": revisions == self.acknowledged,
            "latest": latest == max(self.acknowledged),
            "differences": check_catalog(self.registrar.catalog_dir).differences,
        }


def main() -> None:
    scenario = Scenario(Path(sys.argv[2]), sys.argv[1])
    try:
        print(json.dumps(asyncio.run(scenario.run())))
    finally:
        scenario.registrar.close()


if __name__ == "__main__":
    main()
