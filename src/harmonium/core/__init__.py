"""The foundation of all other packages: errors, seeds, files, settings, progress events."""
