"""What every other package stands on: errors, seeds, files, settings, progress events."""
