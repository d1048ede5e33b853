"""The programs that moorage stands on (CRIU, runc, etcd, nft, ip): found, installed, and checked by ``doctor``."""
