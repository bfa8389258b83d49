"""Benchmarks that drive the whole of Roost, and what they write. May import anything of ours.

Every scenario writes one JSON object: environment, samples, summary. A figure that was not measured is absent.
"""
