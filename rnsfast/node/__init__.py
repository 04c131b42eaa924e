"""The runtime: reactor, dispatcher, configuration, storage and the thread-facing API."""
