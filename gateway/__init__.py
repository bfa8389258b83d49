"""The front door: OpenAI's API and the admin API. Stateless; it resolves, places, leases, forwards.

It may import wire, catalog and packer; never the sidecar, whose word it gets by messages only. A request's way:
``http`` (a connection becomes an exchange) -> ``dataplane`` (each step of a request, in order) -> ``auth``, ``body``,
``resolve``, ``quotas``, ``placement``, ``leases`` -> ``http`` again (the engine's answer is relayed) -> ``answer``,
``usage`` and ``echo`` (what is read off it and done to it on its way) -> ``trace``, ``metrics``, ``accesslog``. All
that is no data route is ``control``.

What placement knows comes in beside that: ``membership`` says who is in the ``fleet``, whose links keep ``nodes``
current and send ``signs`` of life; ``popularity`` follows how much policies are asked, and ``copies`` are made by it.
``peers`` says which other nodes a node may ask for bytes.
"""
