"""Files and batches of clients, kept on disk; their lines run as throughput work beside other
calls.
"""
