"""One visit: bring a deployment up, warm it up, offer its loads, sample its memory, gate, write."""
