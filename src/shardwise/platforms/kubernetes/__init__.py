"""Manifests of a run for Kubernetes, and the client that submits and watches them."""
