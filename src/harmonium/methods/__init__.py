"""Federated algorithms: one module or package for each published method, registered by name."""

from harmonium.core.registry import Registry
from harmonium.federation.method import Method

methods: Registry[Method] = Registry("method", "harmonium.methods", Method)
