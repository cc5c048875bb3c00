"""Who says what to whom: one file a published system, found by name."""

from harmonium.federation.method import Method
from harmonium.registry import Registry

methods: Registry[Method] = Registry("method", "harmonium.methods", Method)
