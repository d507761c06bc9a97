"""Listeners of events: console, ledger, run folder. They see records, never the run itself."""
