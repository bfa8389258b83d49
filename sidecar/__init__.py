"""The node's side of serving: leases, admission, cold loads, the arena of adapter bytes, and every engine slot.

Pure, events in, effects out, the time passed in: ``machine`` takes the events (``events``, ``effects``) and hands them
to what it is made of. ``state`` is what these share.

- leases: ``leases``, ``waiters`` (who waits for one), ``resync`` (after a crash of either side)
- admission: ``admission`` (the queue of loads), ``turns`` (whose turn it is), ``gate`` (who may wait), ``estimates``
  and ``promises`` (when those refused should come back), ``limit`` (how many loads at once), ``pace`` (of one tenant's
  beside others), ``rates`` (what is measured)
- loads: ``loads``, ``seats`` (which slot, and who leaves for it), ``completions`` (what follows from the ends of
  fetches and calls), ``negative`` (what failed)
- other nodes: ``neighbours`` (who may have bytes), ``gives`` (what they take of ours)
- ahead of who asks: ``prefetch``, ``transfers`` (from trainers, while they write), ``known`` (whose revisions concern
  this node)
- engines: ``slots``, ``calls`` (as many at a time as one takes), ``lifecycle`` (they come and go)
- bytes: ``cache`` and ``extents`` (the arena's index), ``copies`` (the disk tier's), ``policies`` (what leaves them)
- its books: ``audit``; what gateways are told: ``report``; ``timers``

``service`` performs the effects with what touches the world: ``engines`` (their processes and calls), ``fetch`` (in
threads, from the store or nearer ``sources``: ``disk``, the copies on this host, and ``peers``, other nodes),
``giving`` (what those take), ``arena`` (shared memory),
``offers`` (the registrar's feed), ``pulls`` (trainers' feeds and chunks), ``reporter`` (the node's own feed),
``cordon`` (what outlives the sidecar), ``transitions`` (the log).
``settings`` and ``__main__`` are the process.

Imports wire, catalog, packer and backends' drivers; never gateway, never torch.
"""
