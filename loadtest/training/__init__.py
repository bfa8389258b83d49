"""What the benchmarks of training have in common: a base, a mesh that trains and serves it, a client, memory."""
