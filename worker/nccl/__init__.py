"""The worker's side of NCCL in a pod: the processes with the libnccl proxy, and which files it stands over."""
