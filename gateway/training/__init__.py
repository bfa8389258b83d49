"""The training service: the training API, durable and outside of the trainer's ranks; a process of its own.

It may import wire, catalog, packer, ``backends.trainer`` and, of the gateway, its authentication and its placement's
hashing. An operation's way:
``api`` (a request becomes a typed ``Work``) -> ``journal`` (logged, and only then acknowledged) -> ``lines`` (a run's
operations in the order of their seq_id) -> ``executor`` (what each means) -> ``trainees`` (the trainer, in fair turns)
or ``publishing`` -> ``journal`` again (result and effects in one transaction) -> ``futures`` (who waits is told).
Samples go from ``journal`` to ``sampling``, which asks the gateway like any client. ``store`` is LMDB below it all. A
revision on its way is in ``transfers`` (nodes pull it while it is written; ``expected`` is which one is expected to be
asked for it) and ``copying`` (the artifact store); ``retention`` keeps those that are sampled from.
What was saved goes by ``removal``; ``listings`` is what there is, in pages.
"""
