"""The guard: a small process for each pod that outlives the worker. `client` is the worker's side, `server` its own.

Kept empty on purpose: the guard imports this package, and must stay small.
"""
