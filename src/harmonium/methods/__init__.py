"""Who says what to whom: one file a published system, found by name."""

from harmonium.core.registry import Registry
from harmonium.federation.method import Method

methods: Registry[Method] = Registry("method", "harmonium.methods", Method)
