"""The pipeline, with one file per job.

locate -> fetch -> build prompts -> load -> capture each layer -> replay it -> record
"""
