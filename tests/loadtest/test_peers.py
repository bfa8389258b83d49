from __future__ import annotations

import os

from loadtest.peers import _round


async def test_nodes_that_take_from_each_other_read_the_store_once() -> None:
    data = os.urandom(2 << 20)
    assert (await _round(data, peer_transfers=0, nodes=3))[0] == 3.0
    assert (await _round(data, peer_transfers=8, nodes=3))[0] == 1.0
