"""SGLang: the driver (``driver``, ``client``, ``command``, ``folder``), how it is asked (``dialect``, ``token_level``,
``unheeded``), and what runs inside the engine.

SGLang has an environment of its own, in which Roost is installed too. A server that we start is ``launch``; only what
it loads (``plugin``, ``server``, ``requests``, ``parameters``, ``scheduler``, ``arena``, ``seeds``, ``cpu_standins``,
``versions``) may import SGLang or torch. Both sides share ``terms``.
"""
