"""The embedded cluster: etcd, a coordinator and workers on one machine, each worker in a namespace that stands for a host."""
