"""The consistent cut: stops all ranks of a job where every NCCL operation that was issued has all its partners.

`model` is the data, `gate` what stands at the entry of NCCL in each process, `cut` and `picture` the decisions,
`rounds` the conversation between the coordinator and the gates, `driver` what carries it. docs/consistent-cut.md has
the argument.
"""
