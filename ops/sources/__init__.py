"""Where ``roost publish`` takes adapters from: a folder, an object store, a model hub.

What is not a folder is fetched into a private one first: the two files of a PEFT adapter, by name, of bounded size, and
nothing else of what lies beside them.
"""
