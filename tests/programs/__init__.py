"""Tiny programs for pods, each of which checks itself. Standard library only: they run as scripts in a pod."""
