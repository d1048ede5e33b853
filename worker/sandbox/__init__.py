"""The sandbox of a pod: its OCI configuration (pure), the runc driver, CRIU's options, the cgroup, and pid 1."""
