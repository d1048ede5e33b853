"""The embedded cluster: etcd, a coordinator and workers, each worker in a namespace that stands for a host."""
