"""Claims of papers decided by runs here: `harmonium study`."""
