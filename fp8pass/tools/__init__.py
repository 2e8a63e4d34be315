"""Tools around the rewrite, which no file of it imports: tables and pages, measurements, searches, exports and estimates."""
