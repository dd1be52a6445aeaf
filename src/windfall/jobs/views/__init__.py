"""What people see of a service: tables in a terminal, and the page."""
