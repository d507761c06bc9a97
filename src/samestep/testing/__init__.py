"""A public test kit: ranks as threads, ranks as processes, fault schedules, tiny models."""
