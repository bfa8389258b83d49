"""Training recipes: SFT, DPO, GRPO and a search, as clients of the training API alone, by the stock ``tinker`` SDK.

``config`` says what a run is told; ``data`` reads items, ``text`` turns them into tokens; ``sft``, ``dpo`` and ``grpo``
say what a step and an evaluation are; ``course`` takes a recipe through its steps and goes on after a kill with what
``folder`` kept; ``search`` runs many at once; ``plot`` and ``display`` show it. May import everything; only ``dpo``
imports torch.
"""
