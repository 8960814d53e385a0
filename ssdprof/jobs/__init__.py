"""The jobs behind the commands: each turns a request into a report, through all stages."""
