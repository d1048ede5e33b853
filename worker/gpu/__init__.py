"""The GPU part of capture and restore: the broker that owns bulk device memory, and the worker's side of it."""
