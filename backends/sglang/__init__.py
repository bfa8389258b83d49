"""SGLang: the driver and what runs inside the engine's processes."""
