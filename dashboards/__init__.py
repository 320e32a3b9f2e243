"""Grafana dashboards as code, Prometheus rules, and the page that lists every series."""
