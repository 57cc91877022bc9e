"""Files and batches of clients: kept on disk, run as throughput work beside all other calls."""
