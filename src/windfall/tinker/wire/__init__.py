"""The HTTP interface of the Tinker API: from requests of the SDK to calls of the service (calls.py), and back."""
