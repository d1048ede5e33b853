"""How daemons are watched: metrics for Prometheus, health, word to the service manager."""
