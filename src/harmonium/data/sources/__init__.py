"""Where published data sets come from: addresses, packages, copies that a user has."""
