"""What Prometheus and Grafana are told about runs: names, rules, alerts, dashboard, scraping."""
