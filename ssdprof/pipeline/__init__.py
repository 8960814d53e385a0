"""The way of the data, one file per job.

locate -> fetch -> build prompts -> load -> capture each layer -> replay it -> record
"""
