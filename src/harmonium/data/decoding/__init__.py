"""From image files to one array, in several processes."""
