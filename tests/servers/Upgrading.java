// What java.net.http.HttpClient does by itself on http://: it asks for an upgrade to HTTP/2 with its first request.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.io.ByteArrayInputStream;
import java.nio.charset.StandardCharsets;

public class Upgrading {
    public static void main(String[] arguments) throws Exception {
        URI uri = URI.create(arguments[0] + "/generate");
        HttpClient client = HttpClient.newHttpClient();
        for (String text : new String[] {"{\"text\": \"say:known length\"}", "{\"text\": \"say:again\"}"}) {
            tell(client, HttpRequest.newBuilder(uri).POST(HttpRequest.BodyPublishers.ofString(text)));
        }
        byte[] chunked = "{\"text\": \"say:in chunks\"}".getBytes(StandardCharsets.UTF_8);
        HttpRequest.BodyPublisher publisher = HttpRequest.BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(chunked));
        tell(HttpClient.newHttpClient(), HttpRequest.newBuilder(uri).POST(publisher));
        tell(HttpClient.newHttpClient(), HttpRequest.newBuilder(URI.create(arguments[0] + "/version")));
    }

    private static void tell(HttpClient client, HttpRequest.Builder request) throws Exception {
        HttpResponse<String> answer = client.send(request.build(), HttpResponse.BodyHandlers.ofString());
        System.out.println(answer.version() + " " + answer.statusCode() + " " + answer.body());
    }
}
